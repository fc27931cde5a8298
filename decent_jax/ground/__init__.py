"""What all rooms share: errors, formats, files, config fields, progress."""
