"""The commands: parse, call one library function, print, exit. No algorithm lives here."""
