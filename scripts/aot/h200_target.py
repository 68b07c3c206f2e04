"""Description of an H200 for XLA, to compile for one where there is none.

Figures of the H200 SXM with 141 GB. The compiler takes its limits from them, and from the rates its
guesses of what is worth fusing; nothing here is measured.
"""

from collections.abc import Mapping

# XLA's numbers for element types (PrimitiveType).
_S8, _S32, _U8, _U32, _F16, _F32, _F64, _BF16, _F8E5M2, _F8E4M3 = 2, 4, 6, 8, 10, 11, 12, 16, 19, 20

# Units a core and operations of a unit a clock.
_SCALAR_RATES = {
    _S32: (64, 1),
    _U32: (64, 1),
    _F16: (128, 2),
    _F32: (128, 1),
    _F64: (64, 1),
    _BF16: (128, 2),
}
_MATRIX_RATES = {
    _S8: (4, 1024),
    _U8: (4, 1024),
    _F16: (4, 512),
    _F32: (4, 256),  # as TF32
    _F64: (4, 32),
    _BF16: (4, 512),
    _F8E5M2: (4, 1024),
    _F8E4M3: (4, 1024),
}
_CLOCK_GHZ = 1.98


def h200_target() -> str:
    """The description of an H200, as the text form of XLA's GpuTargetConfigProto."""
    return f"""
        platform_name: "CUDA"
        device_description_str: "NVIDIA H200"
        dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
        gpu_device_info {{
            name: "NVIDIA H200"
            device_vendor: "NVIDIA Corporation"
            platform_version: "Compute Capability 9.0a"
            cuda_compute_capability {{
                major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES
            }}
            driver_version: "13.0.0"
            runtime_version: "13.0.0"
            compile_time_toolkit_version: "13.0.0"
            dnn_version: "9.12.0"
            core_count: 132
            fpus_per_core: 128
            clock_rate_ghz: {_CLOCK_GHZ}
            threads_per_warp: 32
            threads_per_core_limit: 2048
            threads_per_block_limit: 1024
            thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
            registers_per_core_limit: 65536
            registers_per_block_limit: 65536
            shared_memory_per_core: {228 << 10}
            shared_memory_per_block: {48 << 10}
            shared_memory_per_block_optin: {227 << 10}
            l2_cache_size: {60 << 20}
            device_memory_size: {143771 << 20}
            memory_bandwidth: {4800 * 10**9}
            device_address_bits: 64
            pcie_bandwidth: {32 << 30}
            device_interconnect_info {{ active_links: 18 }}
            scalar_unit_description {{ {_rates(_SCALAR_RATES)} }}
            matrix_unit_description {{ {_rates(_MATRIX_RATES)} }}
        }}
    """


def _rates(rates: Mapping[int, tuple[int, int]]) -> str:
    return " ".join(
        f"rate_infos {{ key: {element_type} value {{ clock_rate_ghz: {_CLOCK_GHZ}"
        f" units_per_core: {units} ops_per_clock: {operations} }} }}"
        for element_type, (units, operations) in rates.items()
    )
