// The C interface from Rust: prints the entry points of a package.
//     rustc run.rs -L PATH_OF_LIBRARY -l fusewright_runtime && ./run PACKAGE
use std::ffi::{c_char, c_int, CStr, CString};

#[repr(C)]
struct Package {
    _private: [u8; 0],
}

extern "C" {
    fn fw_load(path: *const c_char, package: *mut *mut Package) -> c_int;
    fn fw_close(package: *mut Package);
    fn fw_last_error() -> *const c_char;
    fn fw_entry_count(package: *const Package) -> usize;
    fn fw_entry_name(package: *const Package, entry: usize) -> *const c_char;
    fn fw_input_count(package: *const Package, entry: usize) -> usize;
}

fn main() {
    let path = CString::new(std::env::args().nth(1).expect("run PACKAGE")).expect("a path");
    let mut package = std::ptr::null_mut();
    unsafe {
        if fw_load(path.as_ptr(), &mut package) != 0 {
            eprintln!("{}", CStr::from_ptr(fw_last_error()).to_string_lossy());
            std::process::exit(1);
        }
        for entry in 0..fw_entry_count(package) {
            let name = CStr::from_ptr(fw_entry_name(package, entry)).to_string_lossy();
            println!("{} takes {} tensors", name, fw_input_count(package, entry));
        }
        fw_close(package);
    }
}
