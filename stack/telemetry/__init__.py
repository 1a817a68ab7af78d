"""OpenTelemetry: reads the standard variables, sets the SDK up, and records what `apis.telemetry` opens and counts."""
