"""What of a program is shown: grid, text, figures, and which schedule to take."""
