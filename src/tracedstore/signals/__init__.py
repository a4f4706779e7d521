"""What is told of the calls: metrics, spans, events, and what is blocked now."""
