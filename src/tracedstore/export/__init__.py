"""How telemetry leaves a process: settings, set-up, HTTP endpoint, OpenTelemetry."""
