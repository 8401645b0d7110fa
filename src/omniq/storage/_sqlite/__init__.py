"""The parts of the SQLite backend; `omniq.storage.sqlite` puts them together."""
