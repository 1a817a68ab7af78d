"""The tools `computer` and `computer_use_preview`, which the client runs."""
