"""Damage to the arrays of a checkpoint."""


def files_of_arrays(step):
    """Which arrays are in which of these files differs from run to run."""
    return sorted(path for path in step.rglob("ocdbt.process_*/d/*") if path.is_file())


def largest(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def cut_short(step):
    path = largest(step / "state")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_bits(step):
    """A bit in every 100 bytes of every file, since an array may be in two, and one is read."""
    for path in files_of_arrays(step):
        data = bytearray(path.read_bytes())
        for place in range(50, len(data), 100):
            data[place] ^= 0x40
        path.write_bytes(data)
