"""Every picture the project draws, in one style."""
