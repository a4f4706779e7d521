"""What a job's logs say after it is dead, as one page. Reads files, knows no store."""
