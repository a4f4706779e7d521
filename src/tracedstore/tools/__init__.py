"""What people run at a terminal. No process of a training job imports it."""
