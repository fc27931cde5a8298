"""Damage to a checkpoint's largest file of arrays."""


def largest(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def cut_short(step):
    path = largest(step / "state")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_bits(step):
    """A bit in every 100 bytes: tensorstore may leave an array in the file twice, and read one."""
    path = largest(step / "state")
    data = bytearray(path.read_bytes())
    for place in range(50, len(data), 100):
        data[place] ^= 0x40
    path.write_bytes(data)
