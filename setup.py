"""What pyproject.toml cannot say: the wheel has the records that `longhorn claims` reads, but not
nbdev's index; and once settings.ini says `published = True`, the links of the package page lead to
the repository."""

import configparser
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
RECORDS = (
    "nbs/lab/results/**/*.json",
    "nbs/lab/results/**/*.jsonl",
    "kernels/results/h200.json",
    "kernels/results/h200_training_step.json",
)


class Build(build_py):
    def find_package_modules(self, package, folder):
        return [
            found
            for found in super().find_package_modules(package, folder)
            if found[1] != "_modidx"
        ]

    def run(self):
        super().run()
        if self.editable_mode:  # the checkout has the records
            return
        for source in (path for pattern in RECORDS for path in ROOT.glob(pattern)):
            target = Path(self.build_lib, "longhorn_kit/recorded", source.relative_to(ROOT))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def readme() -> str:
    "Return README.md; with absolute links if the repository is published."
    settings = configparser.ConfigParser()
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    about = settings["DEFAULT"]
    if not about.getboolean("published"):
        return text
    place = about["git_url"]
    tag = f"v{about['version']}"
    raw = place.replace("https://github.com", "https://raw.githubusercontent.com")
    text = re.sub(r'(!\[[^\]]*\]\(|src="|srcset=")(?!https?:)', rf"\g<1>{raw}/{tag}/", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\g<1>{place}/blob/{tag}/", text)


setup(
    cmdclass={"build_py": Build},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
