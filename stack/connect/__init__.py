"""The command `stack connect`: settings by which coding agents and other clients use a running stack."""
