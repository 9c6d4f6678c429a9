"""Programs that leave their process: captured whole, with named sizes, saved as readable files and loaded again."""
