"""Helpers of tests that run several commands."""

from longhorn_kit import cli


def fails(capsys, argv, code=1):
    "Run a command that must fail, and return its single line of output."
    assert cli.main(argv) == code
    out, err = capsys.readouterr()
    assert err.startswith("longhorn: error: "), err
    assert err.count("\n") == 1, err
    assert "Traceback" not in out + err, err
    return err.removeprefix("longhorn: error: ").strip()
