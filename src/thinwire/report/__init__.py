"""What people read: tables, the live display, and later the report."""
