"""What a process tells others about itself, and how processes of one host ask."""
