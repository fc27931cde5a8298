"""A run's measurements of itself: metrics, goodput, trackers, and its state as read from files."""
