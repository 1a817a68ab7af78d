"""Code that providers of several APIs share: each mechanism exists once, here. It imports the APIs only."""
