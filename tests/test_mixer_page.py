"""The page *Add a mixer*: its text adds a layer to a copy of the kit, and broken layers fail."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import mixer_page
from longhorn_kit.models import MIXERS, LMConfig
from tree_copy import copy_of_the_tree, run_in

ROOT = Path(__file__).parents[1]
BROKEN = """
from longhorn_kit.models.building import register_mixer
from longhorn_kit.models.efla import EFLA

@register_mixer("efla_ahead") # sees the future
class Ahead(EFLA):
    def run(self, x, cache=None, keep_cache=False, text=None):
        y, cache = super().run(x, cache, keep_cache, text)
        return y + x.mean(1, keepdim=True), cache

@register_mixer("efla_narrow") # returns the wrong shape
class Narrow(EFLA):
    def run(self, x, cache=None, keep_cache=False, text=None):
        y, cache = super().run(x, cache, keep_cache, text)
        return y[..., 1:], cache

@register_mixer("efla_forgets") # does not carry its state while it decodes
class Forgets(EFLA):
    def run(self, x, cache=None, keep_cache=False, text=None):
        return super().run(x, None, keep_cache, text)
"""
# broken layer -> check that it fails -> start of the message
DEMANDS = {
    "ahead": {
        "changing_a_token_changes_nothing_before_it": (
            "Changing a token changes no output before it, and all outputs from there on. "
            "AssertionError: an output before the token changed"
        )
    },
    "narrow": {"shapes": "Outputs have the shape of the inputs"},
    "forgets": {
        "any_split_into_prefills_and_steps_equals_one_pass": (
            "Any split into prefills and steps (a length of zero) gives the outputs of one pass."
        ),
        "gradients_flow_through_the_cache": "Two prefills in a row have the gradients of one pass",
    },
}
RESULT = re.compile(
    r"^(PASSED|FAILED) \S+::test_(\w+)\[(?:[\w.-]+-)?(efla\w*)(?:-[\w.-]+)?\](?: - (.*))?$", re.M
)
OPTIONS = "-p no:cacheprovider -q --tb=no -rfp -W ignore -o addopts="  # one line per test


@pytest.fixture
def layer():
    "Return a layer of the page's class, which is registered during a test."
    try:
        exec(mixer_page.module(), {"__name__": "efla"})
        torch.manual_seed(0)
        yield MIXERS["efla"](6)
    finally:
        MIXERS.pop("efla", None)


def test_the_layer_of_the_page_decodes_what_it_trains(layer):
    x = torch.randn(2, 5, 6)
    parts = []
    cache = layer.empty_cache(2)
    for x_t in x.unbind(1):
        y_t, cache = layer.step(x_t, cache)
        parts.append(y_t)
    assert_close(torch.stack(parts, 1), layer(x))


def test_the_independent_check_of_the_page_accepts_its_layer_and_no_other_rate(layer):
    namespace = {}
    exec("\n".join(mixer_page.parts_of("tests/test_efla.py")), namespace)
    check = namespace["test_efla_follows_its_differential_equation"]
    check()
    kind = type(layer)
    right = kind.inputs

    def explicit(self, *arguments):
        scan, gate, past = right(self, *arguments)
        return scan | dict(beta=self.beta_proj(arguments[0]).sigmoid()), gate, past

    kind.inputs = explicit
    with pytest.raises(AssertionError, match="not close"):
        check()


def test_every_change_of_the_page_fits_its_file():
    changes = mixer_page.changes()
    assert len(changes) == 4
    for file, old, new in changes:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert mixer_page.changed(text, file, old, new) != text
        with pytest.raises(AssertionError, match=f"{file} has this text"):
            mixer_page.changed(text, file, "no such text", new)


def test_a_mixer_without_its_import_its_name_or_its_colour_is_an_error():
    with pytest.raises(ValueError, match="mixer is 'efla'; known mixers: attention, "):
        LMConfig(mixer="efla")
    plots = pytest.importorskip("longhorn_kit.plots")
    with pytest.raises(KeyError, match="efla"):
        plots.plot_seeds(plots.plt.gca(), [0, 1], [[1.0, 2.0]], "efla")
    source = Path(plots.__file__).read_text(encoding="utf-8")
    colour = next(new for file, _, new in mixer_page.changes() if "plots" in file)
    colored = source.replace('"rwkv6": "#692DFF",', colour)
    assert colored != source
    with pytest.raises(KeyError, match="efla"):
        exec(colored, {"__name__": "longhorn_kit.plots", "__package__": "longhorn_kit"})


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not shutil.which("make"), reason="the text of the page calls make")
def test_the_text_of_the_page_adds_a_layer_and_its_command_says_what_broken_ones_lack(tmp_path):
    "The command's -k also selects the broken layers and the plain layer, all named efla_..."
    kit = copy_of_the_tree(tmp_path)
    sync, own_check, checks, train = mixer_page.commands()

    done = run_in(kit, f"{checks} {OPTIONS}")
    assert done.returncode == 5, done.stdout  # no test is selected
    mixer_page.apply(kit)
    done = run_in(kit, '.venv/bin/python -c "import longhorn_kit.models"')
    assert "ImportError: cannot import name 'efla'" in done.stderr
    done = run_in(kit, sync)
    assert done.returncode == 0, done.stderr
    done = run_in(kit, f"{own_check} {OPTIONS}")
    assert done.returncode == 0, done.stdout
    shape = "tests/test_house.py tests/test_site.py -k '27_efla or map_names or annotated'"
    done = run_in(kit, f".venv/bin/python -m pytest {shape} {OPTIONS}")
    assert done.returncode == 0, done.stdout
    names = "from longhorn_kit.plots import COLORS, LABELS; print(LABELS['efla'], COLORS['efla'])"
    done = run_in(kit, f'.venv/bin/python -c "{names}"')
    assert re.fullmatch(r"EFLA #[0-9A-F]{6}\n", done.stdout), done.stderr
    done = run_in(kit, f"{train} --steps 4 --warmup 1 --eval-every 4 --context 32 --val 4096")
    assert done.returncode == 0, done.stderr

    plain = mixer_page.plain_mixer().replace('"decay"', '"efla_plain"')
    (tmp_path / "guide.py").write_text(BROKEN + plain)
    done = run_in(kit, f"{checks} -p guide {OPTIONS}")
    passed = set()
    failures = {}
    for outcome, check, name, message in RESULT.findall(done.stdout):
        if outcome == "PASSED":
            passed.add((check, name))
        else:
            failures[check, name] = message
    assert done.returncode == 1, done.stdout
    for right in ("efla", "efla_plain"):
        assert not [check for check, name in failures if name == right], done.stdout
        assert len([check for check, name in passed if name == right]) >= 20
    for name, demands in DEMANDS.items():
        for check, demand in demands.items():
            message = failures[check, f"efla_{name}"]
            assert message.startswith(demand), (name, check, message)
    for message in failures.values():
        assert re.match(r"[A-Z][^\n]+\.", message), message
