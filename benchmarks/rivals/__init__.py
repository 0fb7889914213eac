"""Other libraries, measured beside thinwire. They need an environment of their own: venv.sh."""
