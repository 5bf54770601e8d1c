"""The foundation of every other package: sequences, spaces, random streams, roles, files, workers."""
