"""A hostile command in this process: it must end with one sentence, and nothing may be lost."""


def assert_refused(main, arguments, named, folder, capsys):
    """``main(arguments)`` returns 2 after one short line that names each of the words of ``named``.

    All files in ``folder`` are still there, as they were, and only hidden ones are new.
    """
    before, there = snapshot(folder), set(folder.rglob("*"))
    capsys.readouterr()  # what was said while the folder was made
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, ""), said
    [line] = said.err.splitlines()
    assert not [word for word in named.split() if word not in line], line
    assert len(line.replace(str(folder), "")) <= 300 and line.isprintable(), len(line)
    assert before.items() <= snapshot(folder).items()
    new = set(folder.rglob("*")) - there
    assert not [path for path in new if "/." not in str(path.relative_to(folder.parent))]


def snapshot(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
