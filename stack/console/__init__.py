"""The built-in page: static ES modules without a build step, served by `stack/http/routes/console/page.py`."""
