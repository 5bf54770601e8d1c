"""A folder that resumes: runs, stages, keys."""
