"""The parts of the file backend; `omniq.storage.file` puts them together."""
