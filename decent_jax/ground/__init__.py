"""Common to all rooms: errors, formats, files, config fields, progress."""
