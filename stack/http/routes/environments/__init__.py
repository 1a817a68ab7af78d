"""Routes of environments, their files, templates and artifacts."""
