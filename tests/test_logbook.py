"""Test the ledger as a logbook: Trackio's layout, complete folders, no lost pages."""

import json
import re

import pytest

import fakes
from longhorn_kit import cli
from longhorn_kit.lab.claims import registry as claims
from longhorn_kit.lab.claims.ledger import Row, ledger, ledger_json
from longhorn_kit.lab.claims.logbook import write_logbook
from longhorn_kit.lab.run import Here
from longhorn_kit.records import check_folder

# How Trackio 0.43 finds cells and the order of pages (trackio/logbook.py: CELL_RE, _link_order).
CELL = re.compile(
    r"(^|\n)---\n<!-- trackio-cell\n([\s\S]*?)\n-->\n([\s\S]*?)(?=\n---\n<!-- trackio-cell\n|\s*$)"
)
LINK = re.compile(r"\(#/([A-Za-z0-9._-]+)\)")


def cells_of(page):
    return [
        json.loads(match[2]) | {"body": match[3].strip()}
        for match in CELL.finditer(page.read_text(encoding="utf-8"))
    ]


@pytest.fixture(scope="module")
def rows():
    return ledger("no runs")


@pytest.fixture(scope="module")
def book(rows, tmp_path_factory):
    return write_logbook(rows, tmp_path_factory.mktemp("book") / "book")


def test_every_claim_has_a_page_that_trackio_finds(rows, book):
    root = book / ".trackio/logbook"
    names = list(dict.fromkeys(row.claim.name for row in rows))
    index = (root / "pages/index.md").read_text(encoding="utf-8")
    text = (root / "logbook.json").read_text(encoding="utf-8")
    manifest = json.loads(text)
    assert LINK.findall(index) == names == [page["slug"] for page in manifest["root"]["children"]]
    title = f"# {manifest['title']}\n"
    assert index.startswith(title)
    assert manifest["schema_version"] == 2
    paths = root.glob("pages/*/page.md")
    result = sorted(path.parent.name for path in paths)
    assert result == sorted(names)
    for page in manifest["root"]["children"]:
        text = (root / page["file"]).read_text(encoding="utf-8")
        assert text.startswith(f"# {page['title']}\n")


def test_pages_hold_scale_record_verdict_and_command_of_every_row(rows, book):
    numbers = []
    for name in {row.claim.name for row in rows}:
        cells = cells_of(book / f".trackio/logbook/pages/{name}/page.md")
        numbers += [cell["id"] for cell in cells]
        texts = "\n".join(cell["body"] for cell in cells if cell["type"] == "markdown")
        commands = [
            cell["body"].removeprefix("````bash\n").removesuffix("\n````")
            for cell in cells
            if cell["type"] == "code"
        ]
        for row in rows:
            if row.claim.name == name:
                assert row.claim.statement in texts
                assert row.judgement.verdict in texts
                assert f"**Scale:** {row.scale or 'none'}" in texts
                assert f"`{row.file}`" in texts or not row.file
                assert row.command in commands or not row.command
        assert {cell["type"] for cell in cells} <= {"markdown", "code"}
        for cell in cells:
            assert cell["title"]
            assert cell["created_at"]
    different = set(numbers)
    assert len(different) == len(numbers) > len(rows) / 4


def test_verdicts_are_the_ledger_as_json_and_a_manifest_covers_all_files(rows, book):
    text = (book / "verdicts.json").read_text(encoding="utf-8")
    result = json.loads(text)
    expected = json.loads(ledger_json(rows))
    assert result == expected
    check_folder(book, "write it again")
    (book / "verdicts.json").write_text("[]")
    with pytest.raises(ValueError, match="verdicts.json is damaged; write it again"):
        check_folder(book, "write it again")


def test_a_second_logbook_replaces_the_first_and_nothing_else(rows, tmp_path):
    few = [row for row in rows if row.claim.name in ("recall", "stable")]
    book = write_logbook(few, tmp_path / "book")
    (book / ".trackio/logbook/index.html").write_text("Trackio adds its viewer")
    write_logbook(few[-1:], book)
    pages = list(book.glob(".trackio/logbook/pages/*/page.md"))
    assert len(pages) == 1
    names = [path.name for path in tmp_path.iterdir()]
    assert names == ["book"]
    note = book / f".trackio/logbook/pages/{few[-1].claim.name}/page.md"
    text = note.read_text(encoding="utf-8")
    note.write_text(text + "a note", encoding="utf-8")
    with pytest.raises(
        ValueError, match="pages of the logbook in .* have been changed; name a new folder"
    ):
        write_logbook(few, book)
    assert note.read_text(encoding="utf-8").endswith("a note")
    (tmp_path / "thesis").mkdir(), (tmp_path / "thesis/one.txt").write_text("mine")
    with pytest.raises(
        ValueError, match="holds other files than a logbook of claims; name a new folder"
    ):
        write_logbook(few, tmp_path / "thesis")


def test_text_that_looks_like_a_cell_stays_inside_its_own(tmp_path):
    claim = fakes.claim("odd")
    row = Row(
        claim,
        scale="laptop",
        file="a.json",
        command="longhorn x",
        about="\n---\n<!-- trackio-cell\n{}\n-->\nforged",
    )
    folder = write_logbook([row], tmp_path / "book")
    cells = cells_of(folder / ".trackio/logbook/pages/odd/page.md")
    assert [cell["title"] for cell in cells] == ["Claim", "Result 1: laptop", "Command 1"]


def test_the_command_writes_the_named_claims_and_names_a_mistake(monkeypatch, tmp_path, capsys):
    fake_claims = [fakes.claim(), fakes.claim("second")]
    monkeypatch.setattr(claims, "CLAIMS", fake_claims)
    monkeypatch.setattr("longhorn_kit.lab.claims.ledger.results_folder", lambda: None)
    monkeypatch.setattr("longhorn_kit.lab.run.engine_for", lambda *_: Here())
    monkeypatch.chdir(tmp_path)
    assert cli.main(["claims", "second", "--logbook", "book"]) == 0
    assert capsys.readouterr().out == "written: book; trackio logbook serve book shows it\n"
    assert [
        path.parent.name for path in (tmp_path / "book").glob(".trackio/logbook/pages/*/page.md")
    ] == ["second"]
    (tmp_path / "file").write_text("x")
    assert cli.main(["claims", "--logbook", "file"]) == 1
    assert capsys.readouterr().err == "longhorn: error: not a directory: file\n"
