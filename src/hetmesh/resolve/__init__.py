"""What a recipe means before anything is built."""
