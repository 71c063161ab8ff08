# What `make test` runs: the notebooks, the tests, and the check that notebooks and package agree.
# The check works on a copy, so that a failing run leaves the working tree as it was.
# With arguments it runs those tests alone: sh tests/run.sh tests/test_op.py -k auto
set -eu
# Notebooks run side by side: threads that wait for each other by spinning would cost minutes.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
if [ $# -gt 0 ]; then
  exec python -m pytest -q "$@"
fi
echo "== format and lint (ruff)"
ruff format -q --check || { echo "make test: run 'ruff format' and commit the result"; exit 1; }
ruff check -q
echo "== notebooks (nbdev_test)"
nbdev_test --n_workers 2
echo "== tests (pytest)"
# A file stays in one process: its tests share what they start, import and compile.
python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
echo "== notebooks are clean and the package is what they export"
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -R nbs longhorn_kit settings.ini pyproject.toml README.md LICENSE "$copy"
(cd "$copy" && nbdev_clean && nbdev_export)
for folder in nbs longhorn_kit; do
  diff -r -q -x __pycache__ -x .ipynb_checkpoints "$folder" "$copy/$folder" ||
    { echo "make test: $folder is out of step; run 'make sync' and commit the result"; exit 1; }
done
python tests/gpu.py --stale
echo "all passed"
