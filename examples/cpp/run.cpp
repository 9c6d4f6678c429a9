// Runs a package whose only argument is a matrix of floats, filled with ones, of BATCH rows: run PACKAGE BATCH
#include <fusewright.hpp>
#include <iostream>

int main(int count, char **words) {
    if (count < 3) {
        std::cerr << "run_cpp PACKAGE ROWS: gives a package's first program that many rows of ones\n";
        return 2;
    }
    try {
        fusewright::Package package(words[1]);
        fw_tensor about;
        fusewright::check(fw_input(package.get(), 0, 0, &about));
        int64_t rows = std::stoll(words[2]), columns = about.sizes[1];
        std::vector<float> x(static_cast<size_t>(rows * columns), 1.0f);
        auto results = package({fusewright::tensor(x.data(), FW_FLOAT32, {rows, columns})});
        for (size_t i = 0; i < results[0].count(); i++) std::cout << results[0].cpu().data<float>()[i] << "\n";
    } catch (const fusewright::Error &error) {
        std::cerr << error.what() << "\n";
        return 1;
    }
}
