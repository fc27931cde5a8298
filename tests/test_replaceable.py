"""What a command may replace: a file that this package wrote, and nothing that has no end."""

import os

import pytest
from refusals import refused

from decent_jax.commands import export
from decent_jax.ground.command_line import check_replaceable


@pytest.mark.parametrize("check", [check_replaceable, lambda path, _: export.export("run", path)])
def test_only_regular_files_are_replaced(check, tmp_path):
    """Opening a pipe that nobody writes into waits for ever; a link to nothing makes a file."""
    pipe, link = tmp_path / "pipe.safetensors", tmp_path / "link.safetensors"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "elsewhere" / "x")
    for path in (pipe, link):
        with refused("--out", path):
            check(path, "--out")


def test_no_export_writes_beside_itself_through_a_link(tmp_path):
    out = tmp_path / "model.safetensors"
    (tmp_path / "config.json").symlink_to(tmp_path / "thesis.json")
    for content in (b"", b'12345678{"__metadata__":{"step":"1","which":"last"}'):
        out.write_bytes(content)
        with refused("--out", out):
            export.export("run", out)
    assert not (tmp_path / "thesis.json").exists()


def test_an_empty_file_makes_what_is_beside_it_nobodys(tmp_path):
    out = tmp_path / "model.safetensors"
    out.touch()
    (tmp_path / "config.json").write_text("mine")
    with refused("--out", out):
        export.export("run", out)
