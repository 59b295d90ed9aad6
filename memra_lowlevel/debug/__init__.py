"""Tools that look at the library from outside: doctor, tables, checks. Imports nothing itself."""
