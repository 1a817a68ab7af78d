"""The tools of a response: the table of item types, the registry, and one file or folder for each tool."""
