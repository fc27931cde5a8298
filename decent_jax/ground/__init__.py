"""The foundation of all packages: errors, formats, files, config fields, progress."""
