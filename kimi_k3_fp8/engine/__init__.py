"""What turns weights into FP8: the only room with torch and LLM Compressor, imported by a job."""
