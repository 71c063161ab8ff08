# `make release`: build the sdist and the wheel of HEAD into dist/, check them, install the wheel alone and use it.
# With VERSION=x.y.z it then tags HEAD. It pushes and uploads nothing.
set -eu
python=${PYTHON:-python3} VERSION=${VERSION:-}
stop() { echo "make release: $1" >&2; exit 1; }

now=$(sed -n 's/^version = //p' settings.ini)
tag="v$now"
agrees() { [ "$2" = "$now" ] || stop "settings.ini has version $now, $1 has ${2:-none}"; }
agrees longhorn_kit/__init__.py "$(sed -n 's/^__version__ = "\(.*\)"/\1/p' longhorn_kit/__init__.py)"
agrees CITATION.cff "$(sed -n 's/^version: //p' CITATION.cff)"
agrees "the first heading of CHANGELOG.md" "$(sed -n '/^## /{s/^## \([^ ]*\).*/\1/p;q;}' CHANGELOG.md)"
[ -z "$(git status --porcelain)" ] || stop "the working tree has changes; commit or stash them first"
if [ -n "$VERSION" ]; then
  [ "$VERSION" = "$now" ] || stop "VERSION=$VERSION, but settings.ini has version $now"
  ! git rev-parse -q --verify "refs/tags/$tag" >/dev/null || stop "the tag $tag exists"
  ! grep -q "^## $now (unreleased)" CHANGELOG.md || stop "CHANGELOG.md calls $now unreleased; write the date"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
commit=$(git rev-parse HEAD)
mkdir "$work/source" "$work/dist"
git archive "$commit" | tar -x -C "$work/source"
install() { # into a new environment: name, packages
  name=$1; shift
  [ -d "$work/$name" ] || "$python" -m venv "$work/$name" || stop "$python cannot create a virtual environment"
  "$work/$name/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt "$@" ||
    stop "pip cannot install $*"
}
unset PYTHONPATH

echo "== build"
install tools build twine
"$work/tools/bin/python" -m build -o "$work/dist" "$work/source" >"$work/log" 2>&1 ||
  { tail -n 20 "$work/log" >&2; stop "the build failed"; }
"$work/tools/bin/python" -m twine check --strict "$work"/dist/* || stop "twine check failed"

echo "== install the wheel into a new environment, and use it"
set -- "$work"/dist/*.whl
install clean "$1"
cd "$work" # the checkout is out of reach
clean/bin/python -I - "$now" <<'PY' || stop "the installed wheel failed"
import sys
from importlib.metadata import files
from pathlib import Path
import torch
import longhorn_kit

meta = f"longhorn_kit-{sys.argv[1]}.dist-info"
have = {str(f) for f in files("longhorn-kit") if f.suffix != ".pyc" and f.parts[0] not in ("..", meta)}
have = {name for name in have if not name.startswith("longhorn_kit/recorded/")} # tests/test_extras.py reads them
want = {str(p.relative_to("source")) for p in Path("source/longhorn_kit").rglob("*") if p.is_file()}
want.remove("longhorn_kit/_modidx.py")
assert have == want, f"files of the wheel and of the commit differ: {sorted(have ^ want)}"
assert longhorn_kit.__version__ == sys.argv[1] and Path(longhorn_kit.__file__).is_relative_to(sys.prefix)
q, k, x, b = (torch.randn(1, 5, size) for size in (4, 4, 3, 3))
assert longhorn_kit.longhorn_scan(q, k, x, b).isfinite().all()
PY
cd "$OLDPWD"
install clean "$1[lab]"
cd "$work"
clean/bin/python -m pip check || stop "the wheel's requirements do not fit together"
clean/bin/longhorn --help >help || stop "longhorn --help failed"
cd "$OLDPWD"
rm -rf dist
cp -R "$work/dist" dist
echo "dist/ has the checked files of $(git log -1 --format=%h "$commit"): $(ls -m dist)"

grep -q '^published = True' settings.ini ||
  echo "settings.ini says published = False: the package page would not link to the repository."
if [ -z "$VERSION" ]; then
  echo "Not tagged. To check again and tag: make release VERSION=$now"
else
  git tag -a "$tag" -m "Longhorn Kit $now" "$commit" || stop "git could not create the tag $tag"
  printf 'Tagged %s. Nothing was pushed or uploaded; next:\n' "$tag"
  printf '  %s\n' "git push origin $tag" "pipx run twine upload dist/*"
fi
