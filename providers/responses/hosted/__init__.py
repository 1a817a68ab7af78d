"""Tools that the server runs itself: one file per type of tool."""
