//! A device without hardware, as a plugin.

use kt_core::Unsupported;
use kt_core::cpu::tier::Tier;
use kt_core::testing::TestDevice;

fn backend(_cap: Tier) -> Result<TestDevice, Unsupported> {
    TestDevice::new("device:0", 64 << 20).map_err(|e| Unsupported::new(e.to_string()))
}

kt_core::declare_backend!("device:0", backend);
