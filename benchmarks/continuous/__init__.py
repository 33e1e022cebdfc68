"""What continuous saving brings and costs."""
