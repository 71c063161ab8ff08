"""Run transformers' common model tests on the kit's two classes.

The tests are in the source distribution of the installed transformers, which pip downloads (about
10 MB) to a temporary folder; without a network, this file is skipped. Three modules that the tests
import are not in the source distribution (exporting, generation and a table of configuration
defaults), so empty stand-ins replace them. The tests cover loading, saving, resizing,
initialisation, gradient checkpointing, batching and outputs; tests/test_transformers.py covers the
rest.
"""

import io
import subprocess
import sys
import tarfile
import types
import unittest
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("parameterized")
models = pytest.importorskip("longhorn_kit.models.transformers")

pytestmark = pytest.mark.numeric

SKIPPED = {  # the generation tests are not in the source distribution
    "test_generation_tester_mixin_inheritance"
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    "Return the common test class from the downloaded tests."
    folder = tmp_path_factory.mktemp("transformers")
    package = f"transformers=={metadata.version('transformers')}"
    options = ["-q", "--no-deps", "--no-binary", "transformers", "-d"]
    fetch = [sys.executable, "-m", "pip", "download", *options, folder, package]
    if subprocess.run(fetch, capture_output=True).returncode:
        pytest.skip("pip could not fetch the source distribution of transformers")
    archive = next(Path(folder).glob("transformers-*.tar.gz"))
    with tarfile.open(archive) as tar:
        # Python 3.11.0 to 3.11.3 have no such option
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(folder, [m for m in tar.getmembers() if "/tests/" in m.name])
    return make_suite(folder / archive.name.removesuffix(".tar.gz") / "tests")


def import_tests(folder):
    "Import the tests in `folder` as a package under a separate name, with stand-ins."
    (folder / "__init__.py").touch()
    package = types.ModuleType("hf_tests")
    package.__path__ = [str(folder)]
    sys.modules["hf_tests"] = package
    for name, content in (
        ("exporters", {}),
        ("exporters.test_export", {"ExportTesterMixin": type("ExportTesterMixin", (), {})}),
        ("generation", {}),
        ("generation.test_utils", {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})}),
        ("utils", {}),
        ("utils.test_configuration_utils", {"config_common_kwargs": {}}),
    ):
        module = types.ModuleType(f"hf_tests.{name}")
        module.__path__ = []
        module.__dict__["__doc__"] = "stand-in"
        vars(module).update(content)
        sys.modules[module.__name__] = module


def make_suite(folder):
    "Apply the tests in `folder` to the kit's classes."
    import_tests(folder)
    from hf_tests.test_configuration_common import ConfigTester
    from hf_tests.test_modeling_common import ModelTesterMixin, ids_tensor
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_MAPPING_NAMES,
    )

    # by this, the tests distinguish a base model from one with a loss
    MODEL_MAPPING_NAMES["longhorn"] = "LonghornModel"
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["longhorn"] = "LonghornForCausalLM"

    class ModelTester:
        batch_size = 3
        seq_length = 7
        is_training = True
        hidden_size = 32
        num_hidden_layers = 2
        vocab_size = 99

        def get_config(self):
            return models.LonghornConfig(
                vocab_size=99, d_model=32, n_layer=2, mixer="longhorn_exact"
            )

        def prepare_config_and_inputs_for_common(self):
            return self.get_config(), {
                "input_ids": ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
            }

    class Common(ModelTesterMixin, unittest.TestCase):
        all_model_classes = (models.LonghornModel, models.LonghornForCausalLM)
        has_attentions = False

        def setUp(self):
            self.model_tester = ModelTester()
            self.config_tester = ConfigTester(
                self,
                config_class=models.LonghornConfig,
                common_properties=["hidden_size", "num_hidden_layers"],
            )

        def test_config(self):
            self.config_tester.run_common_tests()

    return Common


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_common_model_tests_of_transformers(suite):
    tests = [
        test
        for test in unittest.defaultTestLoader.loadTestsFromTestCase(suite)
        if test.id().rsplit(".", 1)[-1] not in SKIPPED
    ]
    result = unittest.TextTestRunner(stream=io.StringIO()).run(unittest.TestSuite(tests))
    problems = [f"{test.id()}\n{trace}" for test, trace in result.errors + result.failures]
    assert not problems, "\n\n".join(problems)
    assert (
        result.testsRun - len(result.skipped) >= 60
    )  # most of the 160 are about attention and skip themselves
