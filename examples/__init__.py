"""Programs that show the library at work; no part of an installation."""
