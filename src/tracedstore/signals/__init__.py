"""What leaves a process: metrics, spans, events, and the calls in flight."""
