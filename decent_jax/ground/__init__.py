"""What all packages share: errors, formats, files, config fields, progress."""
