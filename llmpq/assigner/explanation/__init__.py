"""What a plan says about itself: why nothing fits, what binds, what another choice costs."""
