"""Options: each is declared once, and becomes an argument, a keyword and a field of a file."""
