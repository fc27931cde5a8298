"""What every room may import: errors, formats, files, fields of a config, progress."""
