"""What a run keeps on disk, and how it is taken up again or exported."""
