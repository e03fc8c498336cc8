"""The model registry and the pipeline's record in MLflow."""
