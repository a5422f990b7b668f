"""What runs the target model."""
