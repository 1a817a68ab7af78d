"""The way out of containers: a proxy outside of each sandbox that connects to allowed hosts and puts secrets in."""
