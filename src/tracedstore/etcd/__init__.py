"""What happens inside torch's EtcdStore, which only its client can tell."""
